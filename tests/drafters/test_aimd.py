"""Windows that grow while drafts are accepted whole."""

import numpy as np

from drafters.histospec import AimdWindows


def test_windows_by_hand():
    windows, everyone = AimdWindows(4, first=2, step=3, most=7), np.arange(4)
    assert windows[everyone].tolist() == [2, 2, 2, 2]
    assert windows[everyone].dtype == np.int32
    windows.observe(everyone[:3], np.asarray([2, 2, 0]), np.asarray([2, 1, 0]))
    assert windows[everyone].tolist() == [5, 2, 2, 2]  # whole, rejected, nothing drafted, not asked
    windows.observe(everyone[:3], np.asarray([1, 2, 2]), np.asarray([1, 2, 2]))  # less than the window counts
    assert windows[everyone].tolist() == [7, 5, 5, 2]  # 8 is too wide
    windows.observe(np.asarray([2, 0]), np.asarray([5, 7]), np.asarray([5, 6]))  # in any order
    assert windows[everyone].tolist() == [2, 5, 7, 2]
