"""torch's compiler, imported without a trace.

torch.func.grad imports it when it is first called, and importing it sets an environment variable and adds warning
filters. Here it is imported first, and both are as before afterwards.
"""

import os
import warnings

_before = dict(os.environ)
with warnings.catch_warnings():
    import torch._dynamo  # noqa: F401
for _name in set(os.environ) - set(_before):
    del os.environ[_name]
