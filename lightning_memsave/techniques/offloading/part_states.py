"""States of a `Part`, and how each may change."""

from enum import Enum, auto


class Place(Enum):
    HOST = auto()
    SENT = auto()  # on the host, with copies on the device or on their way there
    DEVICE = auto()
    TAKEN_BACK = auto()  # on the device, and what forward has written is on the host
    # From one to another: `send`, `enter`, `take_back`, `leave`, and `drop` or another type.


MOVES = {
    Place.HOST: (Place.SENT,),
    Place.SENT: (Place.SENT, Place.DEVICE, Place.HOST),
    Place.DEVICE: (Place.TAKEN_BACK,),
    Place.TAKEN_BACK: (Place.SENT,),
}


class Writes(Enum):
    """Whether it is known which parameters forward writes in ways that torch does not count."""

    UNKNOWN = auto()
    COMPARED = auto()  # in a training pass, whose weights are all compared with those on the host
    KNOWN = auto()  # a training pass has shown it


FINDINGS = {
    Writes.UNKNOWN: (Writes.UNKNOWN, Writes.COMPARED, Writes.KNOWN),
    Writes.COMPARED: (Writes.COMPARED, Writes.UNKNOWN),
    Writes.KNOWN: (Writes.KNOWN,),
}
