"""`python -m benchmarks.faults`."""

from benchmarks.faults.series import main

if __name__ == "__main__":
    main()
