"""A Jupyter kernel as JupyterLab runs it, and the outputs of its cells."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel


class Kernel:
    def __init__(self, cwd: Path) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(cwd))
        self.children = psutil.Process(self.manager.provisioner.process.pid).children

    def run(
        self,
        code: str,
        timeout: float = 300,
        *,
        person: bool = False,
        on_update: Callable[[str], object] = lambda text: None,
    ) -> dict[str, Any]:
        """Execute a cell. Return its printed text, rich outputs, result, traceback without colors, and number.

        With `person`, the front end can ask its user, as JupyterLab does; otherwise it cannot, as with nbval and
        papermill. `on_update` is called with the text of each display update as soon as the update arrives. The
        function returns when the kernel is idle. The reply alone is not sufficient: a request that arrives before the
        kernel has handled a failure is answered with "aborted".
        """
        found: dict[str, Any] = {"printed": "", "shown": [], "updates": [], "result": "", "error": ""}

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    found["printed"] += content["text"]
                case "display_data":
                    found["shown"].append(content["data"])
                case "update_display_data":
                    found["updates"].append((content["data"], content["metadata"]))
                    on_update(content["data"].get("text/plain", ""))
                case "execute_result":
                    found["result"] = content["data"]["text/plain"]
                case "error":
                    found["error"] = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))

        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=hear, allow_stdin=person)
        assert reply["content"]["status"] != "aborted", "not executed: the kernel was busy with the failure before it"
        return found | {"number": reply["content"]["execution_count"]}

    def interrupted(self, code: str, when: Callable[[], object]) -> dict[str, Any]:
        """Call `run`, and interrupt the kernel as soon as `when()` has returned, which may wait for the cell."""
        group = self.manager.provisioner.pgid

        def interrupt() -> None:
            when()
            os.killpg(group, signal.SIGINT)  # as the manager does, which supports only one thread

        thread = threading.Thread(target=interrupt)
        thread.start()
        found = self.run(code)
        thread.join()
        return found

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
