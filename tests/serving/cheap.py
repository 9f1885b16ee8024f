"""Pass times by which everything that is drafted is verified."""

from rljax.speculation.pass_choice import PassTimes


class Cheap(PassTimes):
    """Passes that verify cost next to nothing."""

    def __getitem__(self, shape):
        return 1e-3 if shape[2] else 1.0
