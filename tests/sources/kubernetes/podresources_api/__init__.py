"""Messages of the kubelet's PodResources API, version 1.

``api.proto`` is ``pkg/apis/podresources/v1/api.proto`` of github.com/kubernetes/kubelet at commit 63b3249, unchanged
(The Kubernetes Authors, Apache License 2.0). ``api_pb2`` is generated from it by the compiler of grpcio-tools 1.74
(protobuf 6.31), so that protobuf 6.31 up to the next but one major version can load it. The exporter reads these messages
itself; here they are what the kubelet of the tests sends, and what the exporter's reader is compared with.
"""
