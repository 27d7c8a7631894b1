"""Where one step runs: already done? return it; else run or submit, wait, check, return."""
