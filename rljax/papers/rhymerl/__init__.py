"""RhymeRL: responses of the previous epoch decide who decodes what."""
