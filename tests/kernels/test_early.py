"""Who may read weights before the kernel before has ended."""

from __future__ import annotations

import threading

import pytest

from narrowcast.kernels.cuda import launch
from narrowcast.kernels.early import weights_written_long_ago


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
