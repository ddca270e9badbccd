#!/usr/bin/env bash
# make dist: build/weft-VERSION.tar.gz of the last commit, or of REF (REF=v0.2.0), and its .sha256. VERSION is that of
# CMakeLists.txt for the commit with its tag, as in 0.2.0, and names any other: 0.2.0-g0123abcd. The same commit gives the same
# bytes. Beside it build/weft-VERSION-recipes: the recipes of Spack and EasyBuild, which name the tarball and its hash (they cannot
# be in the tarball: they would change it).
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "dist: $1. HINT: $2" >&2; exit 1; }
grep -q Format packaging/commit && git rev-parse --git-dir >/dev/null 2>&1 ||
  fail "this is no git checkout" "a tarball is made from a clone; this one is already a tarball's content"
commit=$(git rev-parse --verify --quiet "${REF:-HEAD}^{commit}") || fail "REF=$REF is no commit" "git tag lists the releases"
if [ -z "${REF:-}" ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then
  echo "dist: WARN: changes that are not committed are left out" >&2
fi
version=$(git show "$commit:CMakeLists.txt" | sed -n 's/^project(weft VERSION \([0-9.]*\) .*/\1/p')
release=$version
[ "$(git rev-parse --verify --quiet "v$version^{commit}")" = "$commit" ] || version=$version-g${commit:0:8}
name=weft-$version
mkdir -p build
# Modes and compression do not depend on this machine's configuration, nor the time on the clock: it is the commit's.
git -c tar.umask=0022 archive --format=tar --prefix="$name/" "$commit" | gzip -9 -n >"build/$name.tar.gz"
(cd build && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
hash=$(cut -d ' ' -f 1 "build/$name.tar.gz.sha256")

recipes=build/$name-recipes
rm -rf "$recipes"
mkdir -p "$recipes"
git archive --format=tar "$commit" packaging/spack packaging/easybuild | tar -x --strip-components=1 -C "$recipes"
package=$recipes/spack/packages/weft/package.py
# The folder of recipes lies beside the tarball.
sed -i -e '/^    # make dist:/d' \
  -e "s|^    git = .*|    url = pathlib.Path(__file__).resolve().parents[4].joinpath(\"$name.tar.gz\").as_uri()|" \
  -e "s|^    version(\"main\".*|    version(\"$version\", sha256=\"$hash\")|" "$package"
sed -i -e "s|weft@main|weft@$version|" -e "s|from this checkout|from the tarball beside this folder|" \
  -e "s|packaging/spack|$name-recipes/spack|" -e '/^  develop:/,$d' "$recipes/spack/spack.yaml"
for easyconfig in "$recipes/easybuild/weft-$release"-*.eb; do
  sed -i -e "s|^checksums = .*|checksums = ['$hash']|" -e "s|^version = .*|version = '$version'|" "$easyconfig"
  renamed=$recipes/easybuild/$name${easyconfig#"$recipes/easybuild/weft-$release"}
  [ "$easyconfig" = "$renamed" ] || mv "$easyconfig" "$renamed"
done
[ -z "$(grep -L "$hash" "$package" "$recipes"/easybuild/weft-*.eb)" ] || fail "the recipes do not have the lines that this script replaces" \
  "compare tools/dist.sh with packaging/"
echo "dist: build/$name.tar.gz of commit ${commit:0:8}, $(($(stat -c %s "build/$name.tar.gz") / 1048576 + 1)) MiB, sha256 $hash"
echo "dist: $recipes: recipes of Spack and EasyBuild; keep them beside the tarball"
