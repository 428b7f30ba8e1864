"""Write token files in nanoGPT's format from text: OUT/train.bin and OUT/val.bin for data=tokens.

python experiments/tokenize_text.py corpus.txt tokens/                          # bytes: the split of data=text, exactly
python experiments/tokenize_text.py corpus/ tokens/ --tokenizer gpt2            # GPT-2's BPE, by tiktoken
python experiments/tokenize_text.py corpus/ tokens/ --tokenizer tokenizer.json  # any tokenizer of `tokenizers`
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from normlab import data, tokens
from normlab.explain import ConfigError
from normlab.files import temporary_name
from normlab.pieces import Pieces, pieces


def main(arguments: list[str]) -> int:
    """Exit status 2 for the user's mistake, told in one line, with nothing written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file, or a folder of them; UTF-8 unless tokens are bytes")
    parser.add_argument("out", type=Path, help="a folder")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), gpt2, or a tokenizer.json")
    parser.add_argument("--glob", help="which files of a folder; default: every file")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="the tail of each file; default: 0.1")
    options = parser.parse_args(arguments)
    made: dict[Path, Path] = {}
    try:
        if not 0 < options.val_fraction < 1:
            raise ConfigError(f"--val-fraction={options.val_fraction}: accepted: between 0 and 1")
        if not options.text.exists():
            raise ConfigError(f"{options.text}: no such file or folder")
        cut = pieces(options.tokenizer, "--tokenizer")
        files = data.text_files(options.text, options.glob)
        options.out.mkdir(parents=True, exist_ok=True)
        counts = []
        for held_out, name in enumerate((tokens.TRAIN, tokens.VAL)):
            made[options.out / name] = temporary = temporary_name(options.out / name)
            counts.append(tokens.write(temporary, encoded(files, cut, options.val_fraction, bool(held_out))))
            if counts[-1] < 2:
                raise ConfigError(f"{options.text}: {counts[-1]} tokens for {name}; accepted: 2 or more")
        for target, temporary in made.items():
            temporary.replace(target)
    except (ConfigError, OSError) as error:
        print(f"tokenize_text.py: {error}", file=sys.stderr)
        return 2
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)
    print(f"{options.out}: {counts[0]:,} training and {counts[1]:,} held-out tokens")
    print(f"python experiments/train.py data=tokens data.path={options.out} data.vocab={cut.vocab}")
    return 0


def encoded(files: list[Path], cut: Pieces, val_fraction: float, held_out: bool) -> Iterator[np.ndarray]:
    """The tokens of the head or the tail of each file, in pieces of whole lines."""
    for file in files:
        content = file.read_bytes()
        if cut.identity == b"bytes":
            border = round(len(content) * (1 - val_fraction))
            yield np.frombuffer(content[border:] if held_out else content[:border], np.uint8)
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{file}: line {line} is not UTF-8: {error.reason}") from None
        border = round(len(text) * (1 - val_fraction))
        text = text[border:] if held_out else text[:border]
        while text:
            end = text.rfind("\n", 0, 2**20) + 1 or 2**20
            yield cut.encode(text[:end])
            text = text[end:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
