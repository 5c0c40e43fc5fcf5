"""Tensors whose values lie in host memory for a while, so that their device has room."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class HostCopy:
    """Holds the values of tensors, whose own storage is empty until `restore`.

    The tensors stay the same objects, wherever they are held; meanwhile they must not be read.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Move the values, one storage at a time; views of one storage may be among the tensors."""
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._copies = [(storage, _moved(storage)) for storage in storages.values()]

    def restore(self) -> None:
        """Move the values back. RuntimeError, where the device has no room for all: then they are still here."""
        try:
            for storage, values in self._copies:
                storage.resize_(values.nbytes())
                storage.copy_(values)
        except RuntimeError:
            for storage, _ in self._copies:
                storage.resize_(0)
            raise


def _moved(storage: UntypedStorage) -> UntypedStorage:
    values = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    values.copy_(storage)
    storage.resize_(0)
    return values
