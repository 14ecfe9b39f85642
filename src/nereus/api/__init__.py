"""What Nereus offers to Python code; its names are those of the package, `from nereus import ...` (docs/python-api.md).

job_file, schema   a job file in, a checked Job out
scenario           what to plan for; candidates, estimates, the best plan and why
jobs               the scenario of a job file; the plans of `plan: auto`
machine            what this machine is made of, measured or reported by its driver
"""
