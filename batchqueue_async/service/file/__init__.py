"""What a service's file may say, and how it is read and checked; nothing here opens or runs anything.

    file, environment, --set -> layers -> schema (shapes, rules, kinds, parts) -> reading -> ServiceSpec

`json_schema` and the reference page are made of the same shapes; `templates` has files to begin with.
"""

from __future__ import annotations
