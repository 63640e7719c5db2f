"""Generator of the bundled tasks: small Python programs with one broken function each.

- `functions`: correct functions composed from parts, each with a sentence that says what it does
- `mutations`: every one-token bug of a function, by family
- `split`: which skeletons belong to training and which are held out
- `tasks`: files of three functions, one broken, with tests
- `run`: the test runner that every task repository carries as tests/run.py
- `instances`: tasks as dataset lines and repository files
- `bundle`: git bundles without git, byte for byte the same everywhere

Only the standard library, and only parts of it whose results do not depend on Python's version.
"""
