// The page of an address that no page has.

import { notFound } from "../components/error_page.js";
import { shell } from "../components/shell.js";

notFound(shell(""), `There is no page ${decodeURIComponent(location.pathname)}`, "The address may be misspelled, or the link older than this version.", "/incidents", "All incidents");
