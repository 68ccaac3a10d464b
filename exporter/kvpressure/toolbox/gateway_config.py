"""Token limits at the gateway, ready to use: Envoy Gateway and nginx.

A gateway does not count tokens. It counts bytes (about ``BYTES_PER_TOKEN`` per token, generous for English) and reads
``max_tokens`` in the body. Requests beyond a limit are rejected: 413 for the prompt, 400 for the output.
"""

from __future__ import annotations

from string import Template
from typing import Final

from kvpressure.advice.limits import Caps

BYTES_PER_TOKEN: Final = 6
_ENVELOPE_BYTES: Final = 2048  # JSON around the prompt


def _body_bytes(caps: Caps) -> int:
    """Body limit in bytes that corresponds to the prompt's."""
    return caps.input_tokens * BYTES_PER_TOKEN + _ENVELOPE_BYTES


def envoy_gateway(caps: Caps) -> str:
    """Policies for an HTTPRoute named ``vllm`` (Envoy Gateway 1.4 or later)."""
    return _ENVOY.substitute(body=-(-_body_bytes(caps) // 1024), output=caps.output_tokens)


def nginx(caps: Caps) -> str:
    """A location and its njs script."""
    return _NGINX.substitute(body=_body_bytes(caps), output=caps.output_tokens)


_ENVOY: Final = Template("""\
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: BackendTrafficPolicy
metadata: {name: vllm-input-limit}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: vllm}]
  requestBuffer: {limit: ${body}Ki}   # larger bodies: 413
---
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyExtensionPolicy
metadata: {name: vllm-output-limit}
spec:
  targetRefs: [{group: gateway.networking.k8s.io, kind: HTTPRoute, name: vllm}]
  lua:
    - type: Inline
      inline: |
        local limit = $output
        function envoy_on_request(handle)
          local body = handle:body()
          if body == nil then return end
          local text = body:getBytes(0, body:length())
          local asked = string.match(text, '"max_completion_tokens"%s*:%s*(%d+)') or string.match(text, '"max_tokens"%s*:%s*(%d+)')
          if asked == nil or tonumber(asked) > limit then
            handle:respond({[":status"] = "400", ["content-type"] = "application/json"},
                           '{"error":{"message":"max_tokens is required and may be at most ' .. limit .. '"}}')
          end
        end
""")  # noqa: E501

_NGINX: Final = Template("""\
# /etc/nginx/vllm_limits.js (needs the njs module)
const LIMIT = $output;
function check(r) {
    let body;
    try { body = JSON.parse(r.requestText || '{}'); } catch (e) { r.return(400, 'not JSON\\n'); return; }
    const asked = body.max_completion_tokens || body.max_tokens;
    if (r.method === 'POST' && !(asked > 0 && asked <= LIMIT)) {
        r.headersOut['Content-Type'] = 'application/json';
        r.return(400, JSON.stringify({error: {message: 'max_tokens is required and may be at most ' + LIMIT}}));
        return;
    }
    r.internalRedirect('@vllm');
}
export default { check };

# /etc/nginx/conf.d/vllm.conf, in the server block; "js_import limits from vllm_limits.js;" in the http block
location /v1/ {
    client_max_body_size $body;      # larger bodies: 413
    client_body_buffer_size $body;   # the script reads the body from memory
    js_content limits.check;
}
location @vllm {
    proxy_pass http://vllm;
    proxy_http_version 1.1;
    proxy_buffering off;             # streams
    client_max_body_size $body;
}
""")
