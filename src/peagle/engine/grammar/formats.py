"""Regular expressions for the values of `format` in a JSON schema.

A text that one of them matches as a whole has the format. An expression may leave out the rare
forms of a standard (a leap second, a quoted mailbox), and no more.
"""

# RFC 3339, https://www.rfc-editor.org/rfc/rfc3339. Readers in Python know no year 0.
_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"
_FOURTHS = r"(?:0[48]|[2468][048]|[13579][26])"  # multiples of 4 below 100, except 00
_LEAP_YEAR = rf"(?:\d\d{_FOURTHS}|{_FOURTHS}00)"
_DAY = (
    r"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_HOUR_MINUTE}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+\-]{_HOUR_MINUTE})"

# Appendix A of the same: units follow without a gap.
_N = r"(?:0|[1-9]\d{0,8})"
_SECONDS = rf"{_N}S"
_MINUTES = rf"{_N}M(?:{_SECONDS})?"
_CLOCK = rf"T(?:{_N}H(?:{_MINUTES})?|{_MINUTES}|{_SECONDS})"
_DAYS = rf"{_N}D"
_MONTHS = rf"{_N}M(?:{_DAYS})?"
_CALENDAR = rf"(?:{_N}Y(?:{_MONTHS})?|{_MONTHS}|{_DAYS})(?:{_CLOCK})?"

# RFC 2673 and RFC 4291.
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_LAST_TWO = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    options = [rf"(?:{_GROUP}:){{6}}{_LAST_TWO}"]
    for before in range(8):  # groups before the "::"
        head = rf"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        after = 7 - before  # at most
        tails = [""]
        if after:
            tails.append(_GROUP)
        if after >= 2:
            tails.append(rf"(?:{_GROUP}:){{0,{after - 2}}}{_LAST_TWO}")
        options.append(f"{head}::(?:{'|'.join(tails)})")
    return f"(?:{'|'.join(options)})"


_IPV6 = _ipv6()

# RFC 1123: 253 characters at most, so 6 labels of 39 here. Two hyphens in a row mark
# internationalized names, whose encoding no expression can check. The last label is not a number.
_ALNUM = "[A-Za-z0-9]"
_LABEL = rf"{_ALNUM}(?:-?{_ALNUM}){{0,19}}"
_HOSTNAME = rf"(?:{_LABEL}\.){{0,5}}[A-Za-z](?:-?{_ALNUM}){{0,19}}"
# RFC 5321: dot-separated atoms of 64 characters at most.
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOSTNAME}"

# RFC 3986, section 3 and appendix A.
_PERCENT = "%[0-9A-Fa-f]{2}"
_NAME_CHARACTER = r"A-Za-z0-9\-._~!$&'()*+,;="
_PATH_CHARACTER = rf"(?:[{_NAME_CHARACTER}:@]|{_PERCENT})"
_SEGMENTS = rf"(?:/{_PATH_CHARACTER}*)*"
_HOST = rf"(?:\[{_IPV6}\]|(?:[{_NAME_CHARACTER}]|{_PERCENT})*)"
_AUTHORITY = rf"(?:(?:[{_NAME_CHARACTER}:]|{_PERCENT})*@)?{_HOST}(?::\d{{0,5}})?"
_ROOTED = rf"//{_AUTHORITY}{_SEGMENTS}|/(?:{_PATH_CHARACTER}+{_SEGMENTS})?"
_REST = rf"(?:\?(?:{_PATH_CHARACTER}|[/?])*)?(?:#(?:{_PATH_CHARACTER}|[/?])*)?"
_URI = rf"[A-Za-z][A-Za-z0-9+\-.]*:(?:{_ROOTED}|{_PATH_CHARACTER}+{_SEGMENTS}|){_REST}"
_NO_COLON = rf"(?:[{_NAME_CHARACTER}@]|{_PERCENT})+"
_RELATIVE = rf"(?:{_ROOTED}|{_NO_COLON}{_SEGMENTS}|){_REST}"

# RFC 6570; literals in ASCII only.
_VARIABLE_CHARACTER = rf"(?:[A-Za-z0-9_]|{_PERCENT})"
_VARIABLE = rf"{_VARIABLE_CHARACTER}+(?:\.{_VARIABLE_CHARACTER}+)*(?:\*|:[1-9]\d{{0,3}})?"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}}"
_URI_TEMPLATE = rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|{_PERCENT}|{_EXPRESSION})*"

_POINTER = r"(?:/(?:[^~/]|~[01])*)*"  # RFC 6901

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:{_CALENDAR}|{_CLOCK}|{_N}W)",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "hostname": _HOSTNAME,
    "email": _EMAIL,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",  # RFC 4122
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "uri-template": _URI_TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,8}})(?:#|{_POINTER})",
}
