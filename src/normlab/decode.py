"""Beam search over an encoder-decoder, batched; greedy is a beam of 1.

Shapes: B sentences, K hypotheses of each, T tokens so far, V vocabulary.
"""

import torch
from torch import Tensor

from normlab.model import EncoderDecoder
from normlab.norm import wide
from normlab.parallel import BOS, EOS, PAD
from normlab.position import key_mask


def translate(
    model: EncoderDecoder, source_BS: Tensor, present_BS: Tensor, *, beam: int, length_penalty: float, context: int
) -> tuple[list[list[int]], Tensor]:
    """(pieces without EOS, scores (B,)): of the best hypothesis log p(y) / |y|^length_penalty, |y| with EOS.

    The greedy hypothesis takes part beside the beam's, which can lose it on the way: a wider beam never scores below a
    greedy search. PAD and BOS are never said. The cost is bounded: of 2 S + 10 tokens for a source of S, and of the
    context, only EOS can be the last. The model is in evaluation mode already.
    """
    longest = (2 * present_BS.sum(1) + 10).clamp(max=context)
    tokens, scores = search(model, source_BS, present_BS, beam, length_penalty, longest)
    if beam > 1:
        greedy, others = search(model, source_BS, present_BS, 1, length_penalty, longest)
        worse = scores < others
        tokens, scores = torch.where(worse[:, None], greedy, tokens), torch.where(worse, others, scores)
    said = [row[: row.index(EOS)] for row in tokens.tolist()]
    return said, scores


@torch.no_grad()
def search(
    model: EncoderDecoder, source_BS: Tensor, present_BS: Tensor, beam: int, length_penalty: float, longest_B: Tensor
) -> tuple[Tensor, Tensor]:
    """The best finished hypothesis of each sentence, (B, longest_B.max()) padded with EOS, and its score, (B,).

    At each step the 2 K best continuations are looked at: those among the first K that end are finished, the first K
    that do not go on. A sentence is done when K of its hypotheses have finished, or at its longest.
    """
    longest = int(longest_B.max())
    B, device = len(source_BS), source_BS.device
    mask = key_mask(present_BS, model.encoder.embed.token.weight.dtype)
    memory = model.encoder(source_BS, mask=mask).repeat_interleave(beam, 0)
    mask = mask.repeat_interleave(beam, 0)
    tokens_BKT = torch.full((B, beam, 1), BOS, device=device)
    log_p_BK = torch.full((B, beam), -torch.inf, device=device, dtype=wide(memory).dtype)
    log_p_BK[:, 0] = 0.0  # K equal hypotheses would all go the same way
    best, best_score = torch.full((B, longest), EOS, device=device), log_p_BK.new_full((B,), -torch.inf)
    finished, alive = torch.zeros(B, dtype=torch.long, device=device), torch.arange(B, device=device)
    for length in range(1, longest + 1):
        hidden = model.decoder(tokens_BKT.flatten(0, 1), memory, memory_mask=mask)
        step_NV = wide(model.logits(hidden[:, -1:])[:, 0]).log_softmax(-1)
        step_NV[:, [PAD, BOS]] = -torch.inf
        V = step_NV.shape[-1]
        last = (longest_B[alive] == length).repeat_interleave(beam)
        step_NV.masked_fill_(last[:, None] & (torch.arange(V, device=device) != EOS), -torch.inf)
        total = (log_p_BK[..., None] + step_NV.unflatten(0, (-1, beam))).flatten(1)
        values, places = total.topk(2 * beam)
        parents, said = places // V, places % V
        ended = said == EOS

        done = values[:, :beam].masked_fill(~ended[:, :beam], -torch.inf)
        score, which = (done / length**length_penalty).max(1)
        better = score > best_score[alive]
        ending = tokens_BKT[torch.arange(len(alive), device=device), parents.gather(1, which[:, None])[:, 0], 1:]
        padded = torch.nn.functional.pad(ending, (0, longest - ending.shape[1]), value=EOS)
        best[alive] = torch.where(better[:, None], padded, best[alive])
        best_score[alive] = torch.where(better, score, best_score[alive])
        finished[alive] += torch.isfinite(done).sum(1)

        log_p_BK, kept = values.masked_fill(ended, -torch.inf).topk(beam)
        parents, said = parents.gather(1, kept), said.gather(1, kept)
        before = tokens_BKT.gather(1, parents[..., None].expand(-1, -1, tokens_BKT.shape[-1]))
        tokens_BKT = torch.cat((before, said[..., None]), -1)
        on = (finished[alive] < beam) & (longest_B[alive] > length)
        if not bool(on.all()):  # those that are done leave the batch
            rows = on.repeat_interleave(beam)
            alive, tokens_BKT, log_p_BK = alive[on], tokens_BKT[on], log_p_BK[on]
            memory, mask = memory[rows], mask[rows]
        if not len(alive):
            break
    return best, best_score
