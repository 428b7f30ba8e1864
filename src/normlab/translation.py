"""What a model says to the sentences of a split, and its BLEU."""

from collections.abc import Sequence

import torch

from normlab import cache
from normlab.buckets import assemble
from normlab.decode import translate
from normlab.model import EncoderDecoder, Model
from normlab.parallel import Parallel, Split


def translations(
    model: Model,
    device: torch.device,
    spoken: Parallel,
    split: Split,
    pairs: Sequence[int],
    budget: int,
    *,
    beam: int,
    length_penalty: float,
    context: int,
) -> list[str]:
    """The translations of these pairs' sources, in their order; those of like length are searched together.

    budget: source tokens of all hypotheses that are searched at once, padding included.
    """
    assert isinstance(model, EncoderDecoder)
    lengths = {pair: len(split.source[pair]) + 1 for pair in pairs}
    order, said = sorted(lengths, key=lambda pair: (lengths[pair], pair)), {}
    while order:
        width = lengths[order[-1]]  # longest first: what needs the most memory fails at once
        rows = max(1, budget // (width * beam))
        part, order = order[-rows:], order[:-rows]
        (source, _, present), _ = assemble(split, part, (width, 1 + max(len(split.target[i]) for i in part)))
        where = source.to(device), present.to(device)
        with torch.compiler.set_stance("force_eager"):  # every step has another shape
            found, _ = translate(model, *where, beam=beam, length_penalty=length_penalty, context=context)
        said |= {pair: spoken.text(ids) for pair, ids in zip(part, found, strict=True)}
    return [said[pair] for pair in pairs]


def corpus_bleu(said: list[str], references: list[str]) -> tuple[float, str]:
    """BLEU (0 to 100) and the signature that says how it was computed (Post 2018, arXiv 1804.08771)."""
    metric = cache.extra("sacrebleu.metrics", "data=parallel").BLEU()
    return float(metric.corpus_score(said, [references]).score), str(metric.get_signature())
