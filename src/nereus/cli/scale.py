"""`nereus scale RUN N`: tell a running job that it has other devices from its next step boundary on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nereus.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Give a running job more devices or fewer, from its next step boundary on.

    With fewer, the run gives up those that cost it least. A device that has left is stopped.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    devices: Annotated[tyro.conf.Positional[int | None], tyro.conf.arg(metavar="N")] = None
    """How many devices there are from then on."""
    gone: Annotated[tuple[int, ...], tyro.conf.arg(metavar="ID ...")] = ()
    """Instead of N: these devices go."""
    notice: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """The devices that go are killed after so many seconds, whether the plan has left them or not: a spot reclaim."""

    def main(self) -> int:
        from nereus.rl.supply import SCALE, scale_request
        from nereus.telemetry.folder import check_is_run, holder_of

        check_is_run(self.run)
        if (self.devices is None) == (not self.gone):
            raise UserError(
                "scale takes how many devices there are to be, as in nereus scale RUN 6, or --gone with ids"
            )
        if self.devices is not None and self.devices < 1:
            raise UserError(f"scale: {self.devices} devices: a run needs at least 1; Ctrl-C ends it")
        if self.notice is not None and not self.notice >= 0:
            raise UserError(f"--notice {self.notice}: it must be 0 or more seconds")
        if holder_of(self.run) is None:
            raise UserError(
                f"{self.run} is not running: to go on with other devices, "
                f"nereus run --resume {self.run} --set cluster.devices={self.devices or 'N'}"
            )
        with (self.run / SCALE).open("ab") as file:
            file.write(scale_request(self.devices, self.gone, self.notice))
        wanted = f"{self.devices} devices" if self.devices is not None else f"no device {list(self.gone)}"
        print(f"asked: {self.run} is to have {wanted} from its next step on")
        return 0
