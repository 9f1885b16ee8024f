"""Number formats, and products and sums whose bits do not depend on how many rows are computed together."""
