"""A Jupyter kernel, as JupyterLab runs one, and all that a cell leaves in it."""

import re
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel


class Kernel:
    def __init__(self, cwd: Path) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(cwd))
        self.children = psutil.Process(self.manager.provisioner.process.pid).children

    def run(self, code: str, timeout: float = 60, *, person: bool = False) -> dict[str, Any]:
        """Execute a cell: what it printed, its rich outputs, its result, its error's traceback without colours, and its
        number in the notebook. With `person`, as a front end does that can ask its user; otherwise as nbval and
        papermill do."""
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
                case "execute_result":
                    found["result"] = content["data"]["text/plain"]
                case "error":
                    found["error"] = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))

        reply = self.client.execute_interactive(code, timeout=timeout, output_hook=hear, allow_stdin=person)
        return found | {"number": reply["content"]["execution_count"]}

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
