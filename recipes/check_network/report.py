"""The result as tables for the terminal."""

from typing import Any

from common.terminal import mebibytes


def report(found: dict[str, Any]) -> str:
    """Ranks, all-reduce speeds, and the links and clocks of rank 0, one line each."""
    lines = [f"\nall ranks met {found['met_after_s']:.1f} s after they were started\n"]
    lines += [f"  {'rank':>4}  {'host':<16}  {'interface':<10}  device"]
    for rank, (host, interface, device) in enumerate(found["ranks"]):
        lines.append(f"  {rank:>4}  {host:<16}  {interface or '?':<10}  {device}")
    lines += [f"\n  {'all-reduce':>10}  {'ms':>8}  {'bus MiB/s':>10}"]
    for row in found["all_reduce"]:
        lines.append(
            f"  {mebibytes(row['bytes']):>10}  {row['seconds'] * 1e3:>8.2f}  "
            f"{row['bus_bytes_per_s'] / 2**20:>10,.0f}"
        )
    if found["links_of_rank_0"]:
        lines += [f"\n  {'rank 0 to':<16}  {'MiB/s':>8}  {'its clock is ahead by':>22}"]
        for host, link in found["links_of_rank_0"].items():
            clock = f"{link['clock_ahead_s'] * 1e3:.3f} ± {link['within_s'] * 1e3:.3f} ms"
            lines.append(f"  {host:<16}  {link['bytes_per_s'] / 2**20:>8,.0f}  {clock:>22}")
    return "\n".join(lines)
