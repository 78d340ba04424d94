#!/usr/bin/env bash
# Unpack the statistics half of Nsight Systems, for the tests that check our figures against NVIDIA's own.
#
#     scripts/install_nsys_stats.sh [FOLDER]      # by default .cache/nsys in this checkout
#
# It downloads one Debian package (40 MB) with apt and unpacks it; nothing is installed and no right is needed.  The
# program can then export and evaluate existing recordings (`nsys stats`), not make new ones.  Its licence forbids
# changes and is no free one: never commit the folder.  Needs apt; outside Debian also DEBIAN_MIRROR=URL, and the
# package debian-archive-keyring.
set -euo pipefail

version='2023.4.4.54~12.4.1-2'
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.cache/nsys}

if [ "$(dpkg --print-architecture)" != amd64 ]; then
  echo "this package exists for amd64 only" >&2
  exit 1
fi
mkdir -p "$folder/lists/partial"
folder=$(cd "$folder" && pwd)

# the mirror that this Debian uses anyway; elsewhere (Ubuntu) it must be given
mirror=${DEBIAN_MIRROR:-}
if [ -z "$mirror" ] && [ -f /etc/apt/sources.list.d/debian.sources ]; then
  mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -n 1)
elif [ -z "$mirror" ] && [ -f /etc/debian_version ] && ! grep -qi ubuntu /etc/os-release; then
  mirror=$(sed -nE 's/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p' /etc/apt/sources.list | head -n 1)
fi
[ -n "$mirror" ] || { echo "no Debian mirror is configured: set DEBIAN_MIRROR to the URL of one" >&2; exit 1; }
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
trust="signed-by=$keyring"
[ -f "$keyring" ] || { echo "install debian-archive-keyring first: apt checks the package against it" >&2; exit 1; }
echo "deb [$trust] $mirror trixie non-free" > "$folder/debian.list"

# a source list and an index of our own; the system's stay as they are
options=(
  -qq
  -o "Dir::Etc::sourcelist=$folder/debian.list"
  -o Dir::Etc::sourceparts=-
  -o "Dir::State::Lists=$folder/lists"
  -o "Dir::Cache=$folder/cache"
)
# only root may drop privileges, and apt's own user could not write here
[ "$(id -u)" -ne 0 ] || options+=(-o APT::Sandbox::User=root)
apt-get "${options[@]}" update
(cd "$folder" && apt-get "${options[@]}" download "nsight-systems-target=$version")
dpkg-deb -x "$folder"/nsight-systems-target_*.deb "$folder"
rm -rf "$folder"/nsight-systems-target_*.deb "$folder/lists" "$folder/cache" "$folder/debian.list"

nsys=$folder/usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys
"$nsys" --version
echo "export MRV2_NSYS_STATS=$nsys"
