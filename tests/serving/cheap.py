"""Pass times by which everything that is drafted is verified."""

from rljax.speculation.pass_times import PassTimes


class Cheap(PassTimes):
    """Passes that verify cost next to nothing."""

    def plain(self, batch, length):
        return 1.0

    def verify(self, batch, length, rows):
        return 1e-3

    def draft(self, batch, length, drafter, strategy=None):
        return 1e-3
