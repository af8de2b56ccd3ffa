"""Who may read weights before the kernel before has ended, and what is brought to the cache for the products after."""

from __future__ import annotations

import threading

import pytest
import torch

from narrowcast.kernels.cuda import launch
from narrowcast.kernels.early import upcoming_after, upcoming_weights, weights_written_long_ago


def test_weights_are_read_early_only_by_the_thread_and_for_the_time_that_asked_for_it() -> None:
    elsewhere: list[object] = []
    with pytest.raises(OSError, match="stop"), weights_written_long_ago():  # noqa: PT012
        assert launch.reading() == (("READ_WEIGHTS_EARLY", 1),)
        with weights_written_long_ago():
            pass
        assert launch.reading() == (("READ_WEIGHTS_EARLY", 1),)
        thread = threading.Thread(target=lambda: elsewhere.append(launch.reading()))
        thread.start()
        thread.join()
        raise OSError("stop")
    assert elsewhere == [(("READ_WEIGHTS_EARLY", 0),)]
    assert launch.reading() == (("READ_WEIGHTS_EARLY", 0),)


def test_every_byte_within_the_window_is_brought_once_and_before_it_is_read() -> None:
    sizes = (640, 128, 1024, 320, 640, 128, 1024, 320, 1600)
    order = [torch.zeros(size // 16, 16, dtype=torch.uint8) for size in sizes]
    window = 512
    upcoming = upcoming_weights(order, window)
    for number, rows in enumerate(order):
        with weights_written_long_ago(upcoming):
            runs = upcoming_after(rows)
        assert len(runs) <= 2
        after = order[number + 1 :] + order[:number]
        for run in runs:
            inside = [one for one in after if one.data_ptr() <= run.data_ptr() < one.data_ptr() + one.numel()]
            assert len(inside) == 1, "a product brings what is read after it"
            assert run.data_ptr() % 16 == 0
            assert run.numel() % 16 == 0
    brought = sorted((run.data_ptr(), run.numel()) for runs in upcoming.values() for run in runs)
    for (first, size), (second, _) in zip(brought, brought[1:], strict=False):
        assert first + size <= second, "nothing is brought twice"
    # All of what is smaller than the window, and the window's length of what is larger.
    assert sum(size for _, size in brought) == sum(min(size, window) for size in sizes)
    assert upcoming_after(order[0]) == ()


def test_weights_that_the_copy_engine_cannot_address_are_left_out() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    aligned, shifted, strided = memory[:1024], memory[1025:2049], memory[2048:].view(32, 64)[:, :32]
    assert upcoming_weights([aligned, shifted, strided], 512) == {aligned.data_ptr(): ()}
