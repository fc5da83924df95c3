//! The chat page at `/`: static files in the binary, so that nothing has to be installed and no other host is contacted.
//!
//! A browser loads `index.html`, one script and one style, and KaTeX once an answer has maths. Files under `/page/` have a
//! digest in their names and may be cached for ever; `index.html`, which names them, is validated each time.
//!
//! The policy below is strict on purpose: scripts and styles only from files of this server, no inline code but the one
//! script with the digest given, no plug-ins, no frames, and (Trusted Types) no way for a script to turn text into markup.
//! A model's output stays text even if the page's renderer has a bug.

mod bundle;
mod sources;

use std::collections::HashMap;
use std::sync::LazyLock;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";
const WOFF2: &str = "font/woff2";

/// Cached, and validated by its ETag.
const VALIDATED: &str = "no-cache";
/// The name of the file has its digest.
const IMMUTABLE: &str = "public, max-age=31536000, immutable";

/// Serves the page at `/` and its files under `/page/`.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/", get(index)).route("/page/{file}", get(file))
}

async fn index(headers: HeaderMap) -> Response {
    SITE.serve(&SITE.index, VALIDATED, &headers)
}

async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    match SITE.files.get(&name) {
        Some(file) => SITE.serve(file, IMMUTABLE, &headers),
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

static SITE: LazyLock<Site> = LazyLock::new(|| Site::build().expect("a test builds the page from the same files"));

/// The files as they are served.
struct Site {
    index: PageFile,
    /// By name.
    files: HashMap<String, PageFile>,
    policy: HeaderValue,
}

struct PageFile {
    kind: &'static str,
    bytes: Bytes,
    etag: HeaderValue,
}

#[derive(Debug, thiserror::Error)]
enum PageError {
    #[error(transparent)]
    Bundle(#[from] bundle::BundleError),
    #[error("`{0}` is not in the text that refers to it")]
    Unused(String),
}

impl Site {
    fn build() -> Result<Self, PageError> {
        let mut files = Files::default();
        let mut katex_style = format!("/*\n{}*/\n{}", sources::FONTS_LICENCE, sources::KATEX_STYLE);
        for &(path, bytes) in sources::FONTS {
            let name = files.add(path, WOFF2, bytes);
            replace(&mut katex_style, &format!("fonts/{path}"), &name)?;
        }
        let katex = format!("/*!\n{}*/\n{}", sources::KATEX_LICENCE, sources::KATEX);
        let script = bundle::join(&sources::MODULES.iter().copied().collect(), "app/main.js")?;
        let mut index = sources::INDEX.to_owned();
        for (name, kind, text) in [
            ("app.js", JS, script),
            ("app.css", CSS, sources::STYLES.concat()),
            ("icon.svg", SVG, sources::ICON.to_owned()),
            ("katex.js", JS, katex),
            ("katex.css", CSS, katex_style),
        ] {
            let hashed = files.add(name, kind, text);
            replace(&mut index, &format!("\"page/{name}\""), &format!("\"page/{hashed}\""))?;
        }
        replace(&mut index, " src=\"page/first-paint.js\">", &format!(">{}", sources::FIRST_PAINT))?;
        let index = PageFile::new(HTML, index);
        Ok(Self { index, files: files.0, policy: policy(sources::FIRST_PAINT) })
    }

    fn serve(&self, file: &PageFile, caching: &'static str, headers: &HeaderMap) -> Response {
        let always = [
            (header::ETAG, file.etag.clone()),
            (header::CACHE_CONTROL, HeaderValue::from_static(caching)),
            (header::CONTENT_SECURITY_POLICY, self.policy.clone()),
            (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
        ];
        if is_cached(headers, &file.etag) {
            return (StatusCode::NOT_MODIFIED, always).into_response();
        }
        (always, [(header::CONTENT_TYPE, file.kind)], file.bytes.clone()).into_response()
    }
}

#[derive(Default)]
struct Files(HashMap<String, PageFile>);

impl Files {
    /// Adds a file and returns its name, which has a digest of its bytes.
    fn add(&mut self, name: &str, kind: &'static str, bytes: impl Into<Bytes>) -> String {
        let bytes = bytes.into();
        let (stem, ending) = name.rsplit_once('.').expect("files of the page have an ending");
        let name = format!("{stem}-{}.{ending}", digest(&bytes));
        self.0.insert(name.clone(), PageFile::new(kind, bytes));
        name
    }
}

impl PageFile {
    fn new(kind: &'static str, bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let etag = HeaderValue::from_str(&format!("\"{}\"", digest(&bytes))).expect("hex digits in quotes");
        Self { kind, bytes, etag }
    }
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Replaces a part of a text, which must have it.
fn replace(text: &mut String, part: &str, with: &str) -> Result<(), PageError> {
    if !text.contains(part) {
        return Err(PageError::Unused(part.to_owned()));
    }
    *text = text.replace(part, with);
    Ok(())
}

fn policy(inline_script: &str) -> HeaderValue {
    let digest = STANDARD.encode(Sha256::digest(inline_script));
    let policy = format!(
        "default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; font-src 'self'; img-src 'self'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'; trusted-types 'none'"
    );
    HeaderValue::from_str(&policy).expect("base64 is visible ASCII")
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
    use axum::body::{Body, to_bytes};
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

    async fn text(path: &str) -> String {
        let body = to_bytes(get(path, None).await.into_body(), usize::MAX).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    }

    /// The names under `/page/` in a text.
    fn names(text: &str) -> Vec<&str> {
        text.split("\"page/").skip(1).map(|rest| rest.split('"').next().unwrap()).collect()
    }

    #[tokio::test]
    async fn the_index_is_validated_and_names_files_that_are_cached_for_ever() {
        let index = get("/", None).await;
        assert_eq!(index.headers()[header::CACHE_CONTROL], "no-cache");
        assert_eq!(index.headers()[header::CONTENT_TYPE], HTML);
        let index = text("/").await;
        let named = names(&index);
        let loaded = named.iter().map(|name| name.split_once('-').unwrap().0);
        assert_eq!(loaded.collect::<Vec<_>>(), ["icon", "app", "app", "katex", "katex"]);
        for name in named {
            let response = get(&format!("/page/{name}"), None).await;
            assert_eq!(response.status(), StatusCode::OK, "{name}");
            let headers = response.headers();
            let kind = match name.rsplit_once('.').unwrap().1 {
                "js" => JS,
                "css" => CSS,
                _ => SVG,
            };
            assert_eq!(headers[header::CONTENT_TYPE], kind, "{name}");
            assert_eq!(headers[header::CACHE_CONTROL], "public, max-age=31536000, immutable", "{name}");
            assert_eq!(headers[header::CONTENT_SECURITY_POLICY], SITE.policy, "{name}");
            assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff", "{name}");
            assert!(headers.contains_key(header::ETAG), "{name}");
        }
    }

    #[tokio::test]
    async fn the_fonts_that_the_maths_style_names_are_served() {
        let index = text("/").await;
        let style = names(&index).into_iter().find(|name| name.starts_with("katex") && name.ends_with(".css")).unwrap();
        let style = text(&format!("/page/{style}")).await;
        let fonts: Vec<_> =
            style.split("url(").skip(1).map(|rest| rest.split(')').next().unwrap().to_owned()).collect();
        assert_eq!(fonts.len(), sources::FONTS.len());
        for font in fonts {
            let response = get(&format!("/page/{font}"), None).await;
            assert_eq!(response.status(), StatusCode::OK, "{font}");
            assert_eq!(response.headers()[header::CONTENT_TYPE], WOFF2);
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
        for path in
            ["/page/", "/page/app", "/page/app.js", "/page/../Cargo.toml", "/page/..%2fCargo.toml", "/page//etc/passwd"]
        {
            assert_eq!(get(path, None).await.status(), StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[test]
    fn the_page_names_no_other_host() {
        let own = std::iter::once(("index.html", sources::INDEX))
            .chain(sources::STYLES.iter().map(|style| ("a style", *style)));
        for (name, text) in own {
            for part in ["http:", "https:", "url(", "style=", "onclick"] {
                assert!(!text.contains(part), "{name} contains {part}");
            }
        }
        for part in ["http:", "https:", "url(/"] {
            assert!(!sources::KATEX_STYLE.contains(part), "KaTeX's style contains {part}");
        }
    }
}
