"""Does the exporter stay sound while everything around it fails? ``python -m lab.soak``: an hour of faults in
random order.

The real ``kvpressure serve`` on a node of stubs: engines on loopback, an API server, a kubelet, NVIDIA's library,
cgroups and logs, a flight recorder, a clock that can be stepped. Faults come one after the other, in an order that the
seed gives. Throughout: engines without a fault are up with all their series, a pod that is gone and an engine that
fails have no series but those that say so, the health endpoints answer 200. After each fault everything is back, and
how long that took is measured. In the end memory, descriptors and threads are what they were after the first round.
Exit 1 and one line for each thing that was not so.
"""

from lab.soak.run import Result, soak

__all__ = ["Result", "soak"]
