"""Tied weights: weights that several stages use, for the owner and for the borrowers."""

import torch
from torch import Tensor

from zeroshard.comm.collectives import Purpose
from zeroshard.parts.part import Part, Parts
from zeroshard.pipeline.run.borrowed import Borrowed
from zeroshard.pipeline.run.messages import Messages
from zeroshard.pipeline.stage import Stage
from zeroshard.schedule import Action, Kind, Loan
from zeroshard.schedule.run import Key, peer_of


class TiedWeights:
    """The actions of one rank on weights that it lends or borrows.

    Attributes:
        lent_units: the units with lent weights.
        borrowed: weights that each chunk borrows; a stage borrows some once, for the first chunk that uses them.
    """

    def __init__(self, stage: Stage, parts: Parts, messages: Messages) -> None:
        self._stage, self._arena, self._messages, self._gatherer = stage, parts.messages, messages, parts.gatherer
        self._layout = stage.pipeline.layout
        self._lent = {
            loan: _Lent(stage.loans[loan], parts) for loan in stage.loans if self._stage_of(loan.owner) == stage.number
        }
        self.lent_units = {unit for lent in self._lent.values() for unit in lent.units}
        debts = [_Debt(loan, borrowed, messages) for loan, borrowed in stage.borrowed.items()]
        chunks = self._layout.chunks_of(stage.number)
        self.borrowed = {chunk: [debt for debt in debts if debt.loan.borrower == chunk] for chunk in chunks}

    def settle(self) -> None:
        """Receive all versions in flight."""
        for debt in (debt for debts in self.borrowed.values() for debt in debts):
            debt.settle()

    def lend_again(self) -> None:
        """Send the present values of lent weights to their borrowers; a collective call."""
        for loan in self._stage.loans:
            for peer in self._stage.pipeline.peers(loan, self._stage.rank):
                if loan in self._lent:
                    self.lend(Action(Kind.LEND, loan.owner, peer=peer))
                else:
                    self.borrow(Action(Kind.BORROW, loan.borrower, peer=peer))
        self.settle()
        self._messages.finish()

    def repay(self, action: Action) -> None:
        """Send the gradients of a chunk's borrowed weights."""
        debt = self._debt(action)
        sent = debt.borrowed.repay(self._arena)
        self._messages.send(f"repayment {debt.loan}", sent, peer_of(action), Purpose.REPAY_GRADIENTS, scratch=True)

    def collect(self, action: Action) -> None:
        """Add the borrower's gradients to the owner's."""
        loan = self._loan_to(action)
        lent, name = self._lent[loan], f"repayment {loan}"
        shape = ((lent.numel,), torch.promote_types(lent.dtype, torch.float32))
        self._messages.post(name, shape, peer_of(action), Purpose.REPAY_GRADIENTS)
        buffer = self._messages.take(name)
        lent.add(buffer)
        self._messages.release(buffer)

    def lend(self, action: Action) -> None:
        """Send the latest version."""
        loan = self._loan_to(action)
        lent = self._lent[loan]
        packed = self._arena.take(lent.numel, lent.dtype, "lent weights")
        self._gatherer.gather(lent.units)
        lent.pack(packed)
        self._gatherer.free(lent.units)
        name = f"{loan}, version {action.version}"
        self._messages.send(name, packed, peer_of(action), Purpose.LEND_WEIGHTS, scratch=True)

    def borrow(self, action: Action) -> None:
        """Post a buffer for a version."""
        debt = self._debt(action)
        idle = action.microbatch is None
        if idle:
            debt.settle()
        name = f"{debt.loan}, version {action.version}"
        room = debt.borrowed.room(idle)
        self._messages.post_into(name, room, [debt.borrowed.numel], peer_of(action), Purpose.LEND_WEIGHTS)
        debt.coming.append((action.microbatch, name))

    def gathers(self, action: Action, unit: int) -> bool:
        """Whether a LEND gathers a unit."""
        return unit in self._lent[self._loan_to(action)].units

    def elements(self, action: Action) -> int:
        """The elements that a LEND or a REPAY sends."""
        return (
            self._lent[self._loan_to(action)].numel if action.kind is Kind.LEND else self._debt(action).borrowed.numel
        )

    def _debt(self, action: Action) -> "_Debt":
        owner = self._layout.stage_of(peer_of(action))
        return next(debt for debt in self.borrowed[action.chunk] if self._stage_of(debt.loan.owner) == owner)

    def _loan_to(self, action: Action) -> Loan:
        borrower = self._layout.stage_of(peer_of(action))
        return next(
            loan for loan in self._lent if loan.owner == action.chunk and self._stage_of(loan.borrower) == borrower
        )

    def _stage_of(self, chunk: int) -> int:
        return chunk % self._layout.stages


class _Debt:
    """Weights that one chunk borrows from one owner, and the versions in flight, by microbatch and name."""

    def __init__(self, loan: Loan, borrowed: Borrowed, messages: Messages) -> None:
        self.loan, self.borrowed, self._messages = loan, borrowed, messages
        self.coming: list[tuple[int | None, str]] = []

    def begin(self, key: Key) -> None:
        """Begin a forward: install the versions that came for it, and keep its version for its backward."""
        while self.coming and (self.coming[0][0] is None or self.coming[0][0] <= key[1]):
            self._take()
        self.borrowed.begin(key)

    def settle(self) -> None:
        """Receive the versions in flight."""
        while self.coming:
            self._take()

    def _take(self) -> None:
        self._messages.take(self.coming.pop(0)[1])
        self.borrowed.take()


class _Lent:
    """The weights of one loan, on the owner's rank."""

    def __init__(self, names: list[str], parts: Parts) -> None:
        self._places: list[tuple[Part, int]] = []
        for name in names:
            for part in parts.all:
                own = [entry.name for entry in part.flat.index.entries]
                if name in own:
                    self._places.append((part, own.index(name)))
        self.numel = sum(part.flat.index.entries[n].numel for part, n in self._places)
        self.dtype = self._places[0][0].flat.dtype
        self.units = sorted({part.flat.unit.number for part, _ in self._places})

    def add(self, gradients: Tensor) -> None:
        """Add the borrower's gradients to the owner's."""
        for values, (part, number) in self._split(gradients):
            if part.gradients is not None:
                part.gradients.receive(number, values.view(part.flat.index.entries[number].shape))

    def pack(self, into: Tensor) -> None:
        """Copy the latest weights."""
        for values, (part, number) in self._split(into):
            values.copy_(part.flat.view(part.weights.full, number).flatten())

    def _split(self, buffer: Tensor) -> list[tuple[Tensor, tuple[Part, int]]]:
        sizes = [part.flat.index.entries[n].numel for part, n in self._places]
        return list(zip(buffer.split(sizes), self._places, strict=True))
