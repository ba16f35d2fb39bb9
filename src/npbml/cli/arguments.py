"""The words of a command line, read once: which options are there, and with what."""

from collections.abc import Mapping


class Arguments:
    """Words such as `--name value`, `--name=value` and `--name one two`."""

    def __init__(self, words: list[str]) -> None:
        self.words = list(words)

    def all(self, name: str) -> list[str]:
        """Every word that follows an option, as often as that is given."""
        found: list[str] = []
        taken = False
        for word in self.words:
            option, equals, value = word.partition("=")
            if word.startswith("-"):
                taken = option == f"--{name}"
                found += [value] if taken and equals else []
            elif taken:
                found.append(word)
        return found

    def get(self, name: str) -> str | None:
        """The first word that follows an option, where it is given."""
        return next(iter(self.all(name)), None)

    def listed(self, name: str) -> list[str]:
        """The words that follow an option, with spaces or commas between."""
        return [part.strip() for word in self.all(name) for part in word.split(",") if part.strip()]

    @property
    def names(self) -> set[str]:
        """The options that are there, spelt as settings are."""
        return {
            word.partition("=")[0].removeprefix("--").replace("-", "_") for word in self.words if word[:2] == "--"
        }

    @property
    def asks_help(self) -> bool:
        """Whether the help text is asked for."""
        return bool({"-h", "--help"} & set(self.words))

    def without(self, name: str) -> "Arguments":
        """The words less an option and what follows it."""
        kept: list[str] = []
        taken = False
        for word in self.words:
            if word.startswith("-"):
                taken = word.partition("=")[0] == f"--{name}"
            if not taken:
                kept.append(word)
        return Arguments(kept)

    def renamed(self, names: Mapping[str, str]) -> "Arguments":
        """The words with options of other names."""
        words = []
        for word in self.words:
            option, equals, value = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            new = names.get(name) if option.startswith("--") else None
            words.append(f"--{new.replace('_', '-')}{equals}{value}" if new else word)
        return Arguments(words)
