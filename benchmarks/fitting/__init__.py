"""What `memopt fit` predicts, beside what others measured."""
