// Grafana's server writes this object into its page; Grafana's packages read the object while they are imported.
window.grafanaBootData = {
  settings: {
    buildInfo: { version: '13.2.3', env: 'production', edition: 'OSS', commit: '' },
    featureToggles: {}, theme: {}, appSubUrl: '', panels: {}, datasources: {}, defaultDatasource: 'prometheus',
    licenseInfo: {}, unifiedAlerting: {},
    dateFormats: {
      fullDate: 'YYYY-MM-DD HH:mm:ss', useBrowserLocale: false, defaultTimezone: 'browser', defaultWeekStart: '',
      interval: {
        millisecond: 'HH:mm:ss.SSS', second: 'HH:mm:ss', minute: 'HH:mm', hour: 'MM/DD HH:mm', day: 'MM/DD',
        month: 'YYYY-MM', year: 'YYYY',
      },
    },
  },
  user: { timezone: 'browser', locale: 'en-US', permissions: {} },
  navTree: [],
};
