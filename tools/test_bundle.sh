#!/usr/bin/env bash
# Tests the bundle in a bare Debian (debootstrap --variant=minbase), from a folder with a blank in its name, as an unprivileged
# user, without network. Needs root, debootstrap and a Debian mirror; two minutes the first time, after which the system is
# reused: ROOT_DIR (default /var/tmp/weft-bare-debian). Argument: the archive.
set -euo pipefail
cd "$(dirname "$0")/.."
archive=$(readlink -f "${1:?usage: tools/test_bundle.sh build/bundle/weft-VERSION.tar.gz}")
root=${ROOT_DIR:-/var/tmp/weft-bare-debian}
[ "$(id -u)" -eq 0 ] || { echo "test_bundle: needs root, for chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "test_bundle: debootstrap is missing" >&2; exit 1; }
if [ ! -x "$root/bin/sh" ]; then
  echo "test_bundle: making a bare system in $root"
  debootstrap --variant=minbase "${SUITE:-bookworm}" "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
    { tail -n 5 "$root.log" >&2; exit 1; }
fi
for library in libmpi.so.40 libhdf5_serial.so.103 libavcodec.so.59 libdnnl.so.2 libsentencepiece.so.0 libicuuc.so.72; do
  ! compgen -G "$root/usr/lib/*/$library" >/dev/null ||
    { echo "test_bundle: $root has $library, so this would prove nothing" >&2; exit 1; }
done
rm -rf "$root/opt/any where" "$root/home/tester"
mkdir -p "$root/opt/any where" "$root/home/tester" "$root/sys" "$root/proc" "$root/dev/shm"
# The smallest models for weft generate, from its tests.
(cd tests/e2e && python3 -B -c 'import pathlib, sys, tiny_models
home = pathlib.Path(sys.argv[1])
(home / "generate.toml").write_text(tiny_models.TINY_GENERATE_DECK)
tiny_models.write_t5(home / "t5")' "$root/home/tester")
chown -R 4321:4321 "$root/home/tester"
tar -C "$root/opt/any where" -xf "$archive"
cat >"$root/home/tester/steps.sh" <<'STEPS'
set -eu
cd "$HOME"
bundle=$(echo "/opt/any where"/weft-*)
step() { echo "test_bundle: $*"; }
quiet() {  # fails if anything but weft's own messages is on stderr: no complaints of the loader, Open MPI or PMIx
  "$@" 2>err || { cat err >&2; return 1; }
  ! grep -E '^-----|Sorry|cannot open|no version information|symbol lookup|hwloc|PMIX|mca_' err || return 1
}
step "starts alone"
quiet "$bundle/bin/weft" --version
step "two ranks train the smoke deck"
quiet "$bundle/bin/mpirun" --oversubscribe -n 2 weft train "$bundle/inputs/smoke.toml"
grep -E '^time |^20 steps' err
step "writes and reads video"
quiet "$bundle/bin/weft" generate "$bundle/inputs/smoke.toml" sampler.steps=2 generate.num_samples=1
ls runs/smoke/generated/sample_0000.mp4
quiet "$bundle/bin/mpirun" --oversubscribe -n 2 weft ingest "$bundle/inputs/smoke.toml" 'ingest.inputs=["runs/smoke/generated/sample_0000.mp4"]' \
  ingest.output=again.h5 'ingest.frames=[5]' ingest.height=32 ingest.width=32
quiet "$bundle/bin/weft" inspect again.h5
step "cleans captions, full-width letters and accents apart among them, and prompts become a clip"
printf 'Ａ  cafe\314\201 ﬁsh\n' >captions.txt
quiet "$bundle/bin/weft" text "$bundle/inputs/smoke.toml" captions.txt --cleaned cleaned.txt
[ "$(cat cleaned.txt)" = "a café fish" ]
quiet "$bundle/bin/mpirun" --oversubscribe -n 2 weft generate generate.toml t5.weights=t5 \
  'generate.prompts=["a cat", "a dog {\"num_frames\": 1}"]'
ls out/sample_0000.mp4 out/sample_0001.png
step "goes on from its checkpoint through a link"
ln -sf "$bundle/bin/weft" weft
quiet "$bundle/bin/mpirun" --oversubscribe -n 2 ./weft train "$bundle/inputs/smoke.toml" train.steps=22
grep 'resuming from' err
if "$bundle/bin/weft" doctor --help >/dev/null 2>&1; then
  step "doctor"
  quiet "$bundle/bin/mpirun" --oversubscribe -n 2 weft doctor | tail -n 12
fi
step "AVX2 side"
WEFT_CPU_ISA=v3 quiet "$bundle/bin/weft" train "$bundle/inputs/smoke.toml" run.dir=v3 train.steps=2
grep AVX2 err
STEPS
# In its own namespaces: the mounts end with it, and if ip is available, loopback is the only network.
spaces=(--mount)
if command -v ip >/dev/null; then spaces+=(--net); fi
unshare "${spaces[@]}" sh -euc '
  command -v ip >/dev/null && ip link set lo up
  mount -t proc proc "$1/proc"; mount -t sysfs -o ro sysfs "$1/sys"; mount -t tmpfs shm "$1/dev/shm"; chmod 1777 "$1/dev/shm"
  exec chroot --userspec=4321:4321 "$1" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/home/tester \
    OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_mpi_yield_when_idle=1 sh /home/tester/steps.sh' sh "$root"
echo "test_bundle: passed"
