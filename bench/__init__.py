"""The benchmarks: `python -m bench --help`. README.md says what each scenario means and what was measured last."""
