//! The chat page at `/`: static files in the binary, so that nothing has to be installed and no other host is contacted.
//!
//! The policy below is strict on purpose: scripts and styles only from files of this server, no inline code, no plug-ins, no
//! frames, and (Trusted Types) no way for a script to turn text into markup. A model's output stays text even if the page's
//! renderer has a bug.

use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use sha2::{Digest, Sha256};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// Serves the page at `/` and its files under `/page/`.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(index)).route("/page/{*path}", get(file))
}

async fn index(headers: HeaderMap) -> Response {
    serve_file("index.html", &headers)
}

async fn file(Path(path): Path<String>, headers: HeaderMap) -> Response {
    serve_file(&path, &headers)
}

/// A file of the page and its ETag.
struct PageFile {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
    etag: HeaderValue,
}

impl PageFile {
    fn new(path: &'static str, bytes: &'static [u8]) -> Self {
        let kind = match path.rsplit_once('.').map(|(_, end)| end) {
            Some("html") => HTML,
            Some("css") => CSS,
            Some("js") => JS,
            Some("svg") => SVG,
            _ => "application/octet-stream",
        };
        let digest = Sha256::digest(bytes);
        let hex: String = digest[..12].iter().map(|byte| format!("{byte:02x}")).collect();
        let etag = HeaderValue::from_str(&format!("\"{hex}\"")).expect("hex digits in quotes are a header value");
        Self { path, kind, bytes, etag }
    }
}

macro_rules! files {
    ($($path:literal)*) => { [$(PageFile::new($path, include_bytes!(concat!("../page/", $path)))),*] };
}

static FILES: LazyLock<Vec<PageFile>> = LazyLock::new(|| {
    Vec::from(files! {
        "index.html"
        "icon.svg"
        "style/base.css"
        "style/chat.css"
        "style/dialog.css"
        "style/frame.css"
        "style/markdown.css"
        "style/status.css"
        "app/announcer.js"
        "app/answer.js"
        "app/api.js"
        "app/chat.js"
        "app/clipboard.js"
        "app/composer.js"
        "app/conversation.js"
        "app/dialogs.js"
        "app/dom.js"
        "app/first-paint.js"
        "app/icons.js"
        "app/main.js"
        "app/markdown/blocks.js"
        "app/markdown/highlight.js"
        "app/markdown/inline.js"
        "app/markdown/links.js"
        "app/markdown/live.js"
        "app/markdown/render.js"
        "app/memory.js"
        "app/message.js"
        "app/plot.js"
        "app/ranks.js"
        "app/server.js"
        "app/settings.js"
        "app/sidebar.js"
        "app/sse.js"
        "app/state.js"
        "app/status-view.js"
        "app/store.js"
        "app/theme.js"
        "app/toast.js"
        "app/transcript.js"
        "app/units.js"
    })
});

fn serve_file(path: &str, headers: &HeaderMap) -> Response {
    let Some(file) = FILES.iter().find(|file| file.path == path) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let always = [
        (header::ETAG, file.etag.clone()),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")), // cached, and validated by its ETag
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    ];
    if is_cached(headers, &file.etag) {
        return (StatusCode::NOT_MODIFIED, always).into_response();
    }
    (always, [(header::CONTENT_TYPE, file.kind)], file.bytes).into_response()
}

/// Whether the client already has the file with this ETag.
fn is_cached(headers: &HeaderMap, etag: &HeaderValue) -> bool {
    let known = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    known
        .flat_map(|list| list.split(','))
        .map(|known| known.trim().trim_start_matches("W/"))
        .any(|known| known == "*" || known.as_bytes() == etag.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path as FilePath;

    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    use super::*;

    async fn get(path: &str, known: Option<&HeaderValue>) -> Response {
        let mut request = Request::get(path);
        if let Some(tag) = known {
            request = request.header(header::IF_NONE_MATCH, tag);
        }
        router().oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    fn list(folder: &FilePath, base: &FilePath, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                list(&path, base, found);
            } else {
                found.insert(path.strip_prefix(base).unwrap().to_str().unwrap().to_owned());
            }
        }
    }

    #[test]
    fn every_file_of_the_folder_is_served_and_no_other() {
        let folder = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("page");
        let mut found = BTreeSet::new();
        list(&folder, &folder, &mut found);
        assert_eq!(found, FILES.iter().map(|file| file.path.to_owned()).collect());
    }

    #[tokio::test]
    async fn files_come_with_their_type_a_strict_policy_and_a_tag() {
        for (path, kind) in
            [("/", HTML), ("/page/style/base.css", CSS), ("/page/app/main.js", JS), ("/page/icon.svg", SVG)]
        {
            let response = get(path, None).await;
            assert_eq!(response.status(), StatusCode::OK, "{path}");
            let headers = response.headers();
            assert_eq!(headers[header::CONTENT_TYPE], kind, "{path}");
            assert_eq!(headers[header::CONTENT_SECURITY_POLICY], POLICY, "{path}");
            assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff", "{path}");
            assert!(headers.contains_key(header::ETAG), "{path}");
        }
    }

    #[tokio::test]
    async fn a_known_tag_is_answered_without_a_body() {
        let tag = get("/", None).await.headers()[header::ETAG].clone();
        assert_eq!(get("/", Some(&tag)).await.status(), StatusCode::NOT_MODIFIED);
        assert_eq!(get("/", Some(&HeaderValue::from_static("\"other\""))).await.status(), StatusCode::OK);
        let weak = HeaderValue::from_str(&format!("\"x\", W/{}", tag.to_str().unwrap())).unwrap();
        assert_eq!(get("/", Some(&weak)).await.status(), StatusCode::NOT_MODIFIED);
    }

    #[tokio::test]
    async fn nothing_outside_of_the_table_can_be_read() {
        for path in ["/page/", "/page/app", "/page/../Cargo.toml", "/page/..%2fCargo.toml", "/page//etc/passwd"] {
            assert_eq!(get(path, None).await.status(), StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[test]
    fn the_page_names_no_other_host() {
        for file in FILES.iter().filter(|file| file.kind == HTML || file.kind == CSS) {
            let text = std::str::from_utf8(file.bytes).unwrap();
            for part in ["http:", "https:", "url(", "style=", "onclick"] {
                assert!(!text.contains(part), "{} contains {part}", file.path);
            }
        }
    }
}
