"""What a run is: its options, how they are read and checked, and what follows from them. No torch here.

- Declarations, with default, help, flag and range: `training` and `launch`, put together in `schema`.
- Reading: `parser` (command line), `load` (YAML, sites and --set), `run_file` (run.json).
- Checks: `validate` (values, launch, schedule, TP, PP, CP, batch), `validate_data`.
- What follows, and warnings: `resolve`, `split`.
"""
