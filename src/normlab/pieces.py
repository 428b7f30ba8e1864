"""Text to token ids: bytes, GPT-2's BPE, or a tokenizer.json of the `tokenizers` library."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normlab import cache
from normlab.explain import ConfigError


@dataclass(frozen=True)
class Pieces:
    vocab: int
    identity: bytes  # what decides the ids
    encode: Callable[[str], np.ndarray]


def pieces(name: str, told: str) -> Pieces:
    """`name`: bytes, gpt2, or a file. `told`: the key or option that it comes from, for messages."""
    if name == "bytes":
        return Pieces(256, b"bytes", lambda text: np.frombuffer(text.encode(), np.uint8))
    if name == "gpt2":
        return _gpt2(told)
    tokenizers = cache.extra("tokenizers", f"{told}={name}")
    try:
        content = Path(name).read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        why = f"{error.strerror}; accepted: bytes, gpt2, or a tokenizer.json file"
        raise ConfigError(f"{told}={name!r}: {why}") from None
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{told}={name!r}: not a tokenizer.json: {error}") from None
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    if vocab > 2**16:
        raise ConfigError(f"{told}={name!r}: {vocab} tokens; accepted: at most 65536, which uint16 holds")
    return Pieces(vocab, content, lambda text: np.array(tokenizer.encode(text).ids, dtype=np.int64))


def _gpt2(told: str) -> Pieces:
    tiktoken = cache.extra("tiktoken", f"{told}=gpt2")
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # a download: whatever its HTTP library raises
        why = f"tiktoken could not download GPT-2's merges ({type(error).__name__})"
        raise ConfigError(
            f"{told}=gpt2: {why}; accepted: a machine with a network, a TIKTOKEN_CACHE_DIR filled on one, "
            f"or a tokenizer.json file"
        ) from None
    special = {"<|endoftext|>"}
    return Pieces(encoding.n_vocab, b"gpt2", lambda text: np.array(encoding.encode(text, allowed_special=special)))
