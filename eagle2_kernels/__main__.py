"""The `eagle2` script and ``python -m eagle2_kernels``: the command line, or what it lacks."""


def main() -> None:
    """Run the command line; it needs the extra ``hf``, which the operators do without."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("eagle2_kernels"):
            raise
        raise SystemExit(f"eagle2: {error}: pip install 'eagle2_kernels[hf]'") from None
    run()


if __name__ == "__main__":
    main()
