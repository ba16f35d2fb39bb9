"""A preconditioner and a loss term of one's own, and a method made of them."""

import npbml


@npbml.PRECONDITIONERS("sign", summary="the sign of the gradient", learned=False)
class Sign(npbml.Preconditioner):
    def transform(self, name, g):
        return g.sign()


@npbml.LOSS_TERMS("confidence", summary="minus the log of the highest probability", learned=False)
class Confidence(npbml.LossTerm):
    def forward(self, items):
        return -items.support.log_softmax(-1).amax(-1).mean()


npbml.register("sign-maml", npbml.compose("maml by signs", "maml", precondition={"chain": ["sign"]}))
npbml.register("confident", npbml.compose("maml that wants to be sure", "maml", loss={"terms": ["confidence"]}))
