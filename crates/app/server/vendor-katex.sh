#!/usr/bin/env bash
# Copies KaTeX from npm into page/katex: its script, its style and its fonts (WOFF2 only, which every browser of today reads).
# Usage: ./vendor-katex.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/page/katex"

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
npm pack --silent --pack-destination "$work" "katex@$1" >/dev/null
tar -xzf "$work"/katex-*.tgz -C "$work"
from=$work/package

rm -f fonts/*.woff2
cp "$from"/dist/fonts/*.woff2 fonts/
cp "$from/dist/katex.min.js" "$from/LICENSE" .
sed 's/,url([^)]*\.woff) format("woff"),url([^)]*\.ttf) format("truetype")//g' "$from/dist/katex.min.css" >katex.min.css
