"""What of a learner stays as it is while it meta-learns, and what that makes of a task."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from npbml.data.tasks import Task
from npbml.learner.batches import Frozen
from npbml.learner.build import begin_network, encoder, for_scores, freeze_fixed_parts, take_encoder
from npbml.learner.settings import ImageSpec, LearnerSettings
from npbml.nets.layers import freeze, initialise, set_norm
from npbml.nets.relation import PrototypeScores, RelationNetwork
from npbml.randomness import generator


class FrozenWork(nn.Module):
    """A network, whose stem is frozen, and what scores the query items."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, settings: LearnerSettings, images: ImageSpec, seed: int) -> None:
        super().__init__()
        self.settings, self.images = settings, images
        self.register_buffer("mean", torch.tensor(images.mean)[:, None, None], persistent=False)
        self.register_buffer("deviation", torch.tensor(images.std)[:, None, None], persistent=False)
        self.network = encoder(settings, images)
        begin_network(self.network, settings, generator(seed, "network"))
        freeze_fixed_parts(self.network, settings)
        self.relation = self._scores(generator(seed, "relation")) if settings.loss.transductive else None

    def _scores(self, random: torch.Generator) -> RelationNetwork | PrototypeScores:
        """What scores the query items; frozen."""
        settings = self.settings
        scores: RelationNetwork | PrototypeScores
        if settings.relation.kind == "network":
            scores = RelationNetwork(self.images.channels, settings.relation)
        else:
            whole = tail = None
            if settings.relation.pretrains:
                whole = encoder(for_scores(settings), self.images, False, False)
            if settings.relation.asks_learner:
                tail = encoder(settings, self.images, False, False).tail
            scores = PrototypeScores(whole, tail, settings.relation)
            set_norm(scores, "running")
        initialise(scores, settings.init.std, random)
        return freeze(scores)  # type: ignore[return-value]

    def take_pretrained(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a pre-trained encoder; the rule's own parts keep their start."""
        take_encoder(self.network, tensors)
        if isinstance(self.relation, PrototypeScores) and (tail := self.relation.tail) is not None:
            tail.load_state_dict({name: tensors[f"tail.{name}"] for name in tail.state_dict()})

    def take_relation(self, tensors: Mapping[str, Tensor]) -> None:
        """Score by what the relation stage has trained: a relation network, or an encoder with a head."""
        if isinstance(self.relation, RelationNetwork):
            self.relation.load_state_dict(tensors)
        elif self.relation is not None and self.relation.encoder is not None:
            own = {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
            self.relation.encoder.load_state_dict(own)

    def see(self, images: Tensor) -> Tensor:
        """Images as the network takes them: bytes are normalised, floats are taken to be so already."""
        if images.is_floating_point():
            return images
        return (images.to(self.mean.dtype) / 255 - self.mean) / self.deviation

    def alone(self) -> dict[str, Frozen]:
        """What frozen networks make of an image whatever its task is: what `prepare` can be given, by name."""
        found, stem = {}, self.network.stem
        if self.settings.net.stem_norm == "running":
            found["features"] = Frozen(self.stem, (stem,))
        if isinstance(self.relation, PrototypeScores):
            settings, asked = self.settings.relation, self.relation.tail is not None
            if found or not asked:
                networks = (stem, self.relation) if asked else (self.relation,)
                views = settings.turns, settings.enlarged, settings.mirrored
                found["embeddings"] = Frozen(self.embed, networks, views)
        return found

    def features_and_scores(
        self, outputs: int, task: Task, known: Mapping[str, Tensor], final_batch: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stem's features of the inner and of the final batch of a task, and the scores of its query items.

        `known` is what `alone` makes of support and query, as far as that has been computed.
        """
        features, embeddings = (known.get(name) for name in ("features", "embeddings"))
        dtype, count = self.mean.dtype, len(task.support_images)
        joint = torch.cat([task.support_images, task.query_images])
        parts = {"joint": slice(None), "support": slice(count), "query": slice(count, None)}
        wanted = self.settings.inner.batch, final_batch
        found = {  # once, where both batches are the joint one
            name: self.stem(joint[parts[name]]) if features is None else features[parts[name]].to(dtype)
            for name in dict.fromkeys(wanted)
        }
        inner, final = (found[name] for name in wanted)
        scores = self.mean.new_zeros(len(task.query_images), 0)
        if self.relation is not None:
            if isinstance(self.relation, RelationNetwork):
                seen = self.see(joint)
            else:  # the inner batch is the joint one wherever scores are asked for
                seen = self.embed(joint, inner) if embeddings is None else embeddings.to(dtype)
            support, query = seen.tensor_split([count])
            scores = self.relation(support, task.support_labels, query, outputs).to(dtype)
        return inner, final, scores

    def stem(self, images: Tensor) -> Tensor:
        """What the frozen blocks make of images."""
        # Where vmap is not compiled away, it does not know channels that come last.
        return self.network.stem(self._laid_out(images)).to(self.mean.dtype, memory_format=torch.contiguous_format)

    def embed(self, images: Tensor, features: Tensor | None = None) -> Tensor:
        """The embeddings by which images are scored; `features` are the stem's, where they are known."""
        assert isinstance(self.relation, PrototypeScores)
        seen = self._laid_out(images)

        def stem(view: Tensor) -> Tensor:
            return features if view is seen and features is not None else self.stem(view)

        views = [self._laid_out(view) for view in self.relation.views(seen)]
        return self.relation.embed(views, stem).to(self.mean.dtype)

    def _laid_out(self, images: Tensor) -> Tensor:
        """Images as convolutions like them best."""
        seen = self.see(images)
        if seen.is_cuda and seen.shape[-1] > 1:
            seen = seen.contiguous(memory_format=torch.channels_last)
        return seen
