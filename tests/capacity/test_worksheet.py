"""The guides' approximations, number for number."""

from __future__ import annotations

import pytest

from kvpressure.capacity.worksheet import Worksheet, guide_name, worksheet

#: kv_cache_calculator(model, context_length, concurrent_requests, gpu_memory_gb, tensor_parallel) worked by hand
WORKED = [
    (("llama_70b", 8192, 10, 80, 4), (51.2, 41.0, False, -10.2, 2)),
    (("llama_70b", 1024, 1, 80, 4), (0.64, 41.0, True, 40.36, 16)),
    (("llama_7b", 4096, 20, 24, 1), (40.96, 6.0, False, -34.96, 2)),
    (("llama_13b", 2048, 10, 80, 2), (10.24, 63.0, True, 52.76, 30)),
    (("mixtral_8x7b", 2048, 8, 80, 2), (16.384, 31.0, True, 14.616, 7)),
    (("something_else", 1000, 1, 80, 1), (1.0, 26.0, True, 25.0, 26)),
]


@pytest.mark.parametrize(("arguments", "result"), WORKED)
def test_the_guides_worksheet(
    arguments: tuple[str, int, int, float, int], result: tuple[float, float, bool, float, int]
) -> None:
    found = worksheet(*arguments)
    assert isinstance(found, Worksheet)
    assert (found.kv_cache_needed_per_gpu, found.available_per_gpu, found.headroom_gb) == pytest.approx(
        (result[0], result[1], result[3])
    )
    assert (found.will_fit, found.max_concurrent) == (result[2], result[4])


def test_exactly_full_does_not_fit() -> None:
    assert not worksheet("llama_7b", 1000, 12, 24, 1).will_fit  # needed 6.0 GB, available 6.0 GB


def test_other_names_of_the_guides_models_get_their_numbers() -> None:
    llama_70b = ("llama_70b", "llama-2-70b", "meta-llama/Llama-2-70b-chat-hf", "Llama-3.1-70B-Instruct")
    names = {**dict.fromkeys(llama_70b, "llama_70b"), "llama-13b": "llama_13b", "llama-2-7b": "llama_7b"}
    names |= {"mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral_8x7b"}
    names |= {name: name for name in ("llama-3.1-8b", "llama-2-70bx", "codellama-34b", "mixtral-8x22b")}
    assert {name: guide_name(name) for name in names} == names
