"""What tests and benchmarks measure rankwatch with. It is not part of the installed package.

- `cases`: the labelled suite, synthetic jobs with one fault or with none; `conditions` and `slow_changes` add more of
  them, `clean_jobs` has long jobs without a fault;
- `scoring`: how well the detectors find the labelled faults; `pipeline`: the detectors and the correlator under test;
- `networks`: loss curves of small networks that are really trained;
- `recorded`: recorded telemetry with labels, scored;
- `peers`: the rules of other projects on the same jobs;
- `traffic`: telemetry of large jobs, for measurements of throughput;
- `tables`: how benchmarks print.
"""
