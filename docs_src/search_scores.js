// What a search shows first: tasks, then quantities, then everything else, the reference
// last. All numbers but those of `score` are Sphinx's own.
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    page.startsWith("howto/") ? 2 * score
      : page.startsWith("quantities/") ? 1.2 * score
      : /^(api|internals|changelog)/.test(page) ? score / 4 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
