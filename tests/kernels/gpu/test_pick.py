"""The picking kernels choose what `kernels.ops.draw` chooses."""

from __future__ import annotations

import pytest
import torch

# Triton's interpreter computes with numpy, which warns of infinities.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def picker_of(device: torch.device, vocab: int, slot_count: int = 8):
    from kernels.ops.triton.ops import TritonOps
    from kernels.ops.triton.picker import Picker

    last = torch.full((slot_count,), 77, dtype=torch.int32, device=device)
    return Picker(TritonOps(device), vocab, last)


@pytest.mark.parametrize("vocab", [50, 4096, 10_001, 151_936])
def test_greedy_takes_the_first_of_the_largest(device: torch.device, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((5, vocab), generator=generator).to(device)
    logits[1, [3, 40]] = 9.0
    logits[2, vocab - 1] = 9.0
    heat = torch.zeros(5, device=device)
    slots = torch.tensor([0, 1, 2, -1, 4], dtype=torch.int32, device=device)
    picker = picker_of(device, vocab)
    result = picker.pick(logits, heat, heat, slots)
    assert result[0].tolist() == logits.argmax(-1).tolist()
    assert result[0, 1:3].tolist() == [3, vocab - 1]
    assert result[1].tolist() == [0] * 5
    assert picker.last_token[[0, 1, 2, 4]].tolist() == result[0, [0, 1, 2, 4]].tolist()
    assert picker.last_token[[3, 5, 6, 7]].tolist() == [77] * 4


@pytest.mark.parametrize("vocab", [50, 9000])
def test_a_draw_inverts_the_cumulative_distribution(device: torch.device, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 64
    logits = (torch.randn((rows, vocab), generator=generator) * 3).to(device)
    logits[0, : vocab // 2] = -torch.inf
    heat = torch.rand(rows, generator=generator).to(device) + 0.3
    noise = torch.rand(rows, generator=generator).to(device)
    noise[:4] = torch.tensor([0.0, 1 - 2.0**-24, 0.0, 1 - 2.0**-24])
    slots = torch.zeros(rows, dtype=torch.int32, device=device)
    tokens = picker_of(device, vocab).pick(logits, heat, noise, slots)[0].long()
    weights = torch.softmax(logits.double() / heat.double()[:, None], -1)
    through = weights.cumsum(-1).gather(1, tokens[:, None]).squeeze(1)
    own = weights.gather(1, tokens[:, None]).squeeze(1)
    assert (own > 0).all()
    # float32 sums move an edge by some 1e-6
    assert (through > noise.double() - 1e-5).all()
    assert (through - own <= noise.double() + 1e-5).all()


def test_a_row_that_is_no_number_fails_alone(device: torch.device) -> None:
    logits = torch.zeros((4, 9000), device=device)
    logits[:, 5] = 1.0
    logits[1, 8000] = torch.nan
    logits[2, :] = -torch.inf
    logits[3, 17] = torch.inf
    heat = torch.tensor([0.0, 0.0, 0.7, 0.7], device=device)
    slots = torch.arange(4, dtype=torch.int32, device=device)
    result = picker_of(device, 9000).pick(logits, heat, heat * 0, slots)
    assert result[1].tolist() == [0, 1, 1, 1]
    assert result[0, 0] == 5
