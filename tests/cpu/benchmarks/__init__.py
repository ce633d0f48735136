"""The code of benchmarks/, on small models: its models, its judges, the fuzzer."""
