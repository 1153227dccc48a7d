"""One command that trains, evaluates, freezes, exports, compares and times a small model with MGLU layers."""
