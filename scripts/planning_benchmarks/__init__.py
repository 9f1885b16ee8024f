"""What a plan predicts, against what is measured."""
