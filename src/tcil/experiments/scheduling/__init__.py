"""Many runs: jobs, workers, executors, and where each stands."""
