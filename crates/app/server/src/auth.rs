//! API keys: which clients may send requests, and which tenant a request belongs to. Without keys, the `Host` is checked.
//!
//! Keys are kept and compared as digests of one length, in constant time, and each request is compared with all of them:
//! the response time reveals neither a key's length nor its position in the list.

use std::collections::HashMap;
use std::fmt;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::Response;
use engine::TenantId;
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::app::SharedApp;
use crate::error::{ApiError, ApiErrorKind};
use crate::host_check;

/// The most keys, and the longest one.
pub const KEYS_MAX: usize = 4096;
pub const KEY_BYTES_MAX: usize = 4096;

/// The keys of a server. Without keys every client is admitted, and all are one tenant.
#[derive(Clone, Default)]
pub struct ApiKeys {
    keys: Vec<ApiKey>,
    /// The highest tenant that a key has, or had before the keys were replaced.
    last_tenant: u64,
}

#[derive(Clone, Copy)]
struct ApiKey {
    digest: [u8; 32],
    tenant: u64,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("an API key is empty")]
    Empty,
    #[error("an API key has characters that a header cannot carry")]
    NotVisible,
    #[error("an API key is longer than {KEY_BYTES_MAX} bytes")]
    TooLong,
    #[error("there are more than {KEYS_MAX} API keys")]
    TooMany,
}

/// The tenant that sent a request; [`authenticate`] puts it into the request's extensions.
#[derive(Clone, Copy, Debug)]
pub struct Caller(pub TenantId);

impl ApiKeys {
    pub fn new<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Result<Self, KeyError> {
        let digests = keys.into_iter().map(|key| match key.as_ref() {
            "" => Err(KeyError::Empty),
            key if key.len() > KEY_BYTES_MAX => Err(KeyError::TooLong),
            key if !key.bytes().all(|byte| byte.is_ascii_graphic()) => Err(KeyError::NotVisible),
            key => Ok(digest(key.as_bytes())),
        });
        let digests: Vec<_> = digests.take(KEYS_MAX + 1).collect::<Result<_, _>>()?;
        if digests.len() > KEYS_MAX {
            return Err(KeyError::TooMany);
        }
        let last_tenant = digests.len() as u64;
        let keys = digests.into_iter().zip(1..).map(|(digest, tenant)| ApiKey { digest, tenant }).collect();
        Ok(Self { keys, last_tenant })
    }

    /// The keys in the text of a file, one per line. Empty lines and lines that begin with `#` are skipped.
    pub fn lines(text: &str) -> impl Iterator<Item = &str> {
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// These keys, with the tenants that they have in `earlier`. A key that is new there gets a tenant that none has had.
    pub(crate) fn with_tenants_of(mut self, earlier: &Self) -> Self {
        let known: HashMap<_, _> = earlier.keys.iter().map(|key| (key.digest, key.tenant)).collect();
        self.last_tenant = earlier.last_tenant;
        for key in &mut self.keys {
            key.tenant = known.get(&key.digest).copied().unwrap_or_else(|| {
                self.last_tenant += 1;
                self.last_tenant
            });
        }
        self
    }

    /// The tenant of this key.
    fn tenant(&self, key: &[u8]) -> Option<TenantId> {
        let given = digest(key);
        let mut found = 0u64;
        for key in &self.keys {
            found.conditional_assign(&key.tenant, key.digest.ct_eq(&given));
        }
        (found != 0).then_some(TenantId(found))
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ApiKeys({})", self.keys.len())
    }
}

/// Middleware that accepts requests with a known key, and adds their [`Caller`]. If the server has no keys, it accepts
/// requests to its own names.
pub async fn authenticate(
    State(app): State<SharedApp>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let keys = app.keys();
    let tenant = if keys.is_empty() {
        host_check::check(&request, &app.config().allowed_hosts)?;
        TenantId(0)
    } else {
        let given =
            given_key(request.headers()).ok_or_else(|| unauthorized("an API key is needed", "missing_api_key"))?;
        keys.tenant(given).ok_or_else(|| unauthorized("this API key is not known", "invalid_api_key"))?
    };
    request.extensions_mut().insert(Caller(tenant));
    Ok(next.run(request).await)
}

/// `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`.
fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes());
    }
    let (scheme, key) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

fn unauthorized(message: &str, code: &'static str) -> ApiError {
    ApiError::new(ApiErrorKind::Authentication, message).code(code)
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_a_tenant_of_its_own() {
        let keys = ApiKeys::new(["one", "two"]).unwrap();
        assert_eq!(keys.tenant(b"one").map(|tenant| tenant.0), Some(1));
        assert_eq!(keys.tenant(b"two").map(|tenant| tenant.0), Some(2));
        assert!(keys.tenant(b"on").is_none() && keys.tenant(b"").is_none());
    }

    #[test]
    fn a_key_that_stays_keeps_its_tenant_and_none_is_given_twice() {
        let first = ApiKeys::new(["one", "two", "three"]).unwrap();
        let second = ApiKeys::new(["four", "three", "one"]).unwrap().with_tenants_of(&first);
        let tenants = |keys: &ApiKeys, names: [&str; 4]| names.map(|name| keys.tenant(name.as_bytes()).map(|t| t.0));
        assert_eq!(tenants(&second, ["one", "two", "three", "four"]), [Some(1), None, Some(3), Some(4)]);
        let third = ApiKeys::new(["two", "five", "four"]).unwrap().with_tenants_of(&second);
        assert_eq!(tenants(&third, ["two", "five", "four", "one"]), [Some(5), Some(6), Some(4), None]);
    }

    #[test]
    fn keys_that_no_header_can_carry_are_refused() {
        for (key, error) in [("", KeyError::Empty), ("a b", KeyError::NotVisible), ("é", KeyError::NotVisible)] {
            assert_eq!(ApiKeys::new([key]).err(), Some(error));
        }
        assert_eq!(ApiKeys::new([&*"k".repeat(KEY_BYTES_MAX + 1)]).err(), Some(KeyError::TooLong));
    }

    #[test]
    fn a_file_of_keys_may_have_comments() {
        assert_eq!(ApiKeys::lines("# ours\nalpha\n\n  beta \n").collect::<Vec<_>>(), ["alpha", "beta"]);
    }
}
