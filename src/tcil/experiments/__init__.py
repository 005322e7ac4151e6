"""The benchmark: settings, runs on disk, calibration of finished tasks, tables and reports, the command line."""
