"""What several commands use: failing, files and their places, progress bars, ranks of torchrun, repository scripts."""
