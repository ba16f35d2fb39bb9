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
                taken = word == f"--{name}"
                found += [value] if equals and option == f"--{name}" else []
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
                taken = word == f"--{name}"
            if not taken and word.partition("=")[0] != f"--{name}":
                kept.append(word)
        return Arguments(kept)

    def take_each(self, name: str) -> tuple[list[str], "Arguments"]:
        """The one word that follows an option, each time it is given, and the words that are left."""
        found: list[str] = []
        kept: list[str] = []
        words = iter(self.words)
        for word in words:
            option, equals, value = word.partition("=")
            if option == f"--{name}":
                found.append(value if equals else next(words, ""))
            else:
                kept.append(word)
        return found, Arguments(kept)

    def renamed(self, names: Mapping[str, str], values: Mapping[str, Mapping[str, str]]) -> "Arguments":
        """The words with other names of options, and, by their new names, with other values of them."""
        words: list[str] = []
        here: Mapping[str, str] = {}
        for word in self.words:
            option, equals, value = word.partition("=")
            if not option.startswith("--"):
                words.append(here.get(word, word))
                continue
            name = names.get(spelt := option.removeprefix("--").replace("-", "_"), spelt)
            here = values.get(name, {})
            kept = option if name == spelt else f"--{name.replace('_', '-')}"
            words.append(f"{kept}{equals}{here.get(value, value)}")
        return Arguments(words)
