"""Programs for the fusion pass: right ones, wrong ones and random ones, and how their results are judged."""
