//! gzip for pages and JSON. Streams are not compressed: their events would wait in the compressor's buffer.

use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{And, NotForContentType, Predicate, SizeAbove};

/// Smaller bodies fit one packet as they are.
const BYTES_MIN: u64 = 1024;

type Compressible = And<And<And<SizeAbove, NotForContentType>, NotForContentType>, NotForContentType>;

/// Compresses the responses to clients that accept gzip.
pub fn layer() -> CompressionLayer<Compressible> {
    let compressible = SizeAbove::new(BYTES_MIN)
        .and(NotForContentType::SSE)
        .and(NotForContentType::const_new("application/x-ndjson"))
        .and(NotForContentType::IMAGES);
    // HTTP threads compress, so speed counts more than size.
    CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(compressible)
}
